"""Diagnoses and reports windows that the NaN guard has refused, and runs them again with the script's own loop."""
