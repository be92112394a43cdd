"""What a device is and how full it may be. Pure values."""
