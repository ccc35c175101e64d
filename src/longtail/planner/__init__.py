"""What should we do now? Pure functions of a snapshot: no clock, no process, no torch."""
