"""headrace's command line, and how a fleet comes to its hosts without Kubernetes."""
