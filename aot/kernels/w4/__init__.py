"""What GEMMs of 4-bit weights have in common, whichever tensor cores they use."""
