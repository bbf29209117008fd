"""From annotation files of any format to batches: readers and checks produce a table; transforms and samplers, batches.

This package imports only `toolkit.base` and `toolkit.index`.
"""
