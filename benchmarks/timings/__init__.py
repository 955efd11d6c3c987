"""Times the strategies in turns to find faster ones, with a bounded chance of error."""
