"""What outlives a process: settings, run folder, checkpoints, status, rows, trackers.

It imports only the loose files of the toolkit, and `Category`.
"""
