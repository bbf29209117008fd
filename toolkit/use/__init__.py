"""What one does with a trained detector: evaluate it again, predict, export.

It may import everything but session, training and validation.
"""
