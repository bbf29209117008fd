"""Many runs from one file of settings."""
