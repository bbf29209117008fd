"""Everything that uses a trained detector: evaluation, prediction, export, publishing.

It may import everything except session, training and validation.
"""
