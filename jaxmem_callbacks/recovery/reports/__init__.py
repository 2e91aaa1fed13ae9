"""The parts of a failure's report: holders of memory, forecasts and remedies, without secrets."""
