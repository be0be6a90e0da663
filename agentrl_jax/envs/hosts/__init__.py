"""Host environments: servers, simulators and Python objects behind one small interface."""
