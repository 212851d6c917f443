"""The planner: turns a demand into a plan of who reads what from whom."""
