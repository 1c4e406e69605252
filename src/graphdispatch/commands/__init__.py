"""The commands that plan, simulate, lint and calibrate: a file each. Needs the extra ``cli``."""
