"""Inspection of a data set, in numbers and in pictures."""
