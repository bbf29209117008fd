"""From annotation files of any format to batches: formats and checks make one table, transforms and samplers the rest.

It imports only the loose files of the toolkit.
"""
