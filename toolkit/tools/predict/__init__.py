"""A trained detector on pictures, folders and videos."""
