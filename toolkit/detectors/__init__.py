"""Detector families, a folder each. They import the core and, where one is built on another, each other; no tool."""
