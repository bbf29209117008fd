"""What a run keeps on disk: settings, run folder, checkpoints, status, metric rows, trackers.

It imports only the loose files of the toolkit, and `Category`.
"""
