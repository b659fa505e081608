-- In a test database only: the outbox notes which transaction has published an event.
CREATE TRIGGER holdfast_testing_note AFTER INSERT ON core.outbox FOR EACH ROW
    EXECUTE FUNCTION holdfast_testing.note_published();
