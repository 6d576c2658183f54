"""The service behind `dpicl serve` and `dpicl mcp`: who may ask, how often, what is answered, and what operators see.

It is given components that are built already. It must not know records, models or settings files.
"""
