"""A user's train step becomes a jitted step that obeys a policy: its donation decided, compiled once, proved and registered."""
