"""What the DRA driver knows about families of devices, beyond what their plugins scan."""
