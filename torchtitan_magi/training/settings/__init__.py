"""Whether a run is possible: its options, their values, and all checks of them."""
