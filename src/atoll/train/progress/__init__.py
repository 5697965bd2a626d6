"""Events, totals and the view of a run."""
