"""For engines that decide about sizes and graphs themselves."""
