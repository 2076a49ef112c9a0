"""An open library: archives in layers on one device, the plans of calls, and what was counted."""
