"""Windows that the NaN guard refused: searched for the cause, reported, and run again by the script's own loop."""
