"""What is done with a trained detector: evaluation, prediction, export.

It may import everything but session, training and validation.
"""
