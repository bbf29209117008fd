"""The parts of one optimizer step: losses, guard, gradients, meters, optimizer, schedules, averages, norms.

Everything takes plain values. It imports only the loose files of the toolkit.
"""
