"""What stands beside the core: imported only by the components that use it, never by the core."""
