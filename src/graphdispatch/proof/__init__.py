"""What makes graphs right for callables that nobody vouches for; it plugs into the runtime by three protocols."""
