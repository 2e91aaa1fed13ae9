"""Parts of a failure's report: live buffers, forecasts and remedies, without secrets."""
