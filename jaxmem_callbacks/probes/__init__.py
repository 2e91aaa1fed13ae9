"""A live process in, Readings out. Never blocks on a device, never raises for lack of support."""
