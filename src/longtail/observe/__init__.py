"""What happened and why? The run store, the live view, TensorBoard, the summary; imports only ``core``.

Everything here reads the events of ``core/events.py``. A sink never takes the run down: where it cannot write it
says so once, keeps going, and says at the end what is missing.
"""
