"""The parts of one optimizer step: losses, guard, gradients, meters, optimizer, schedules, averages, norms.

Functions and classes take plain values. This package imports only `toolkit.base`.
"""
