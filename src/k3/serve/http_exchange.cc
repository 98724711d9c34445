// The handler's side of one connection's answer.
#include <utility>

#include "k3/serve/http_session_internal.h"

namespace k3::serve::internal {
namespace {

/// Sends what the handler says; without an answer the peer is told that it is our fault.
class Exchange final : public Responder {
 public:
  Exchange(std::shared_ptr<Session> session, std::shared_ptr<Flow> flow, HttpHandler& handler)
      : session_(std::move(session)), flow_(std::move(flow)), handler_(handler) {}

  ~Exchange() override {
    if (ended_) return;
    if (begun_) {
      session_->PostClose();
    } else {
      session_->PostSend(handler_.Refusal(500, "the request was dropped without an answer"));
    }
  }

  void Send(HttpReply reply) override {
    if (begun_.exchange(true)) return;
    ended_ = true;
    session_->PostSend(std::move(reply));
  }

  void Begin(HttpReply head) override {
    if (begun_.exchange(true)) return;
    session_->PostBegin(std::move(head));
  }

  bool Write(std::string data) override {
    if (!Promise(data.size())) return false;
    session_->PostWrite(std::move(data));
    return true;
  }

  bool WriteLater(std::size_t about, std::function<std::string()> make) override {
    if (!Promise(about)) return false;
    session_->PostWriteLater(about, std::move(make));
    return true;
  }

  void End() override {
    if (!begun_ || ended_.exchange(true)) return;
    session_->PostEnd();
  }

  void OnClose(std::function<void()> gone) override {
    {
      const std::lock_guard lock(flow_->mutex);
      if (!flow_->closed) {
        flow_->gone = std::move(gone);
        return;
      }
    }
    gone();
  }

 private:
  /// Counts bytes that are going to be sent; false when nobody reads them.
  bool Promise(std::size_t bytes) {
    if (flow_->closed || ended_) return false;
    if (flow_->unsent.fetch_add(bytes) + bytes <= session_->limits().output_bytes) return true;
    session_->PostClose();
    return false;
  }

  std::shared_ptr<Session> session_;
  std::shared_ptr<Flow> flow_;
  HttpHandler& handler_;
  std::atomic<bool> begun_{false}, ended_{false};
};

}  // namespace

std::shared_ptr<Responder> MakeExchange(std::shared_ptr<Session> session,
                                        std::shared_ptr<Flow> flow, HttpHandler& handler) {
  return std::make_shared<Exchange>(std::move(session), std::move(flow), handler);
}

}  // namespace k3::serve::internal
