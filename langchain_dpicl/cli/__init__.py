"""The command `dpicl`. Parses, calls the package, prints; decides nothing."""
