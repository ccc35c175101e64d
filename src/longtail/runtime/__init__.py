"""Who drives it? The job file, the checks before a start, and the controller: observe, plan, act."""
