"""What does work cost? Measured step times, and their estimates while a run goes on."""
