"""What is in a data set: inspection in numbers and in pictures."""
