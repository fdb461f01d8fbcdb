"""The fault injector: off unless configured, and armed only by an explicit switch."""
