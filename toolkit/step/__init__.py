"""What one optimizer step needs: losses, guard, gradients, meters, optimizer, schedules, averages, norms.

Everything takes plain values. It imports only the loose files of the toolkit.
"""
