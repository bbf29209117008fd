"""Windows of NaN reports, run again by the script's own loop."""
