"""What plans are checked against: an exact solver, simple baselines, and the formulas of the papers."""
