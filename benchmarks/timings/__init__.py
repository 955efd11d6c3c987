"""Times strategies in turn to find which are faster, with a bounded chance of error."""
