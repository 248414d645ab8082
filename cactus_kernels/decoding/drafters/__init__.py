"""Where drafts come from: a draft model, the text so far, the target with layers skipped."""
