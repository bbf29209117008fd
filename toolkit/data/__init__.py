"""From annotation files of any format to batches: readers and checks produce a table; transforms and samplers, batches.

It imports only the loose files of the toolkit.
"""
