"""Detector families, one folder each. They import the core and other families they build on, but not the tools."""
