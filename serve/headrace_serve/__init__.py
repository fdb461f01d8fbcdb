"""headrace's serving side: the gateway, the fleet's decisions and their Ray Serve shells."""
