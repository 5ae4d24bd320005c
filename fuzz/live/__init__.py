"""Fuzzing a running gateway over real connections: `python -m fuzz --target ENDPOINT`.

generate   (seed, number, what the gateway announces) -> a case: steps with bytes, no I/O
watch      one connection: what has been said on it, in both directions, and whether that may be
model      which bytes an object may have now
drive      the steps of a case over sockets, and the bystander
cases      cases as files
command    the command line
"""
