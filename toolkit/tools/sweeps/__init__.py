"""Many runs: sweeps, whose settings a file describes, and the choice among detectors."""
