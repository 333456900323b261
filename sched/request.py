"""One sequence, as the planner sees it."""
