"""Production's server under recorded traffic, on a simulated device."""
