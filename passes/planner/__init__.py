"""Facts, budgets and rates to a plan. Pure, and without torch."""
