"""One run: its settings and objects, its loop calls, and what it keeps on disk."""
